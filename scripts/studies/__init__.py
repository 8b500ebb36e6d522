"""What serves one study or one machine."""
