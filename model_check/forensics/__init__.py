"""Evidence when numbers go wrong: finding non-finite tensors, reporting and dumping them."""
