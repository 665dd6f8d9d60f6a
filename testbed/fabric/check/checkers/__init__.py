"""What must hold in every state that can be reached; each module is one property and its reason."""
