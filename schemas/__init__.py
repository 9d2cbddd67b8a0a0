"""The normative texts of the format (FORMAT.md, SPOOL.md) and the schema generated from the code (v1.json)."""
