"""The inference side: routing rows that follow the KV cache, and the hooks of engines."""
