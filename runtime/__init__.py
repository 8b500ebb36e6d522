"""What every command uses: checked settings, the entry point of a command, atomic file writes, ranks, the device."""
