"""One thin Prefect task per step of a release, over plain functions that cache their output by content."""
