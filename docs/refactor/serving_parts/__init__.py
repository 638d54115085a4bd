"""What no stage changes: requests, batching, the model, and what a stage is given."""
