"""Tests of calibrated quantization."""
