"""What of this machine is fine, what is not, and what to do."""
