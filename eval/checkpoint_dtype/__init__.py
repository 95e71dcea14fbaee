"""What encoding checkpoints on the SSD does to states and answers."""
