"""Description of the model's weights, one module per part, for modules and plan."""
