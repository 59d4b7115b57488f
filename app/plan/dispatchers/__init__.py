"""What every transport of tokens to experts needs, one pure record each."""
