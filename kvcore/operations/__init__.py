"""What an operator sees of a server: metrics, health, status, logs, spans."""
