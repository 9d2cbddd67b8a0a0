"""What rr_dataset costs beside the plainest way to do the same, measured side by side: `make bench`."""
