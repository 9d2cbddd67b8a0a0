"""The `rr-dataset` command. It only parses and prints: one library call per command."""
