"""`run.sh passkey`: what each kind of attention brings back from afar."""
