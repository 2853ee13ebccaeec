"""The flows people run (release, rollback), the command line over them, and their settings."""
