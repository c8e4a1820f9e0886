"""Start workers, watch them, stop them; leave nobody behind."""
