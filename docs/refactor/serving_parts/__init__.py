"""The parts that no stage changes: requests, batching, the model and the surroundings of a stage."""
