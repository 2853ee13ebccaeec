"""PyPTO programs: for each one its specification (plain torch) and its kernel (imports pypto, in a subprocess only)."""
