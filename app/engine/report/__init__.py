"""What a run tells: metrics, their sinks, pictures, the live line, opening and closing words."""
