"""Start workers, watch them, stop them; leave no process behind."""
