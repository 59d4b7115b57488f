"""What the model is made of: one description per part, from which modules and plan are made."""
