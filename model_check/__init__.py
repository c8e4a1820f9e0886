"""The worker's world: settings, data, model, training, evidence. Import the submodule you need."""
