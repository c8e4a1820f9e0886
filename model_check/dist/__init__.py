"""The ranks of one job: how they meet, what they tell each other, how they share a model."""
