"""The training side: samples for dataloaders, what a rank needs, and replay in the model."""
