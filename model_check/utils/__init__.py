"""Small helpers of the floor: standard library only, no torch."""
