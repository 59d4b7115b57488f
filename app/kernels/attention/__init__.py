"""What lies between the products of attention."""
