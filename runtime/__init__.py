"""What every command stands on: checked settings, the frame of a command, whole files, ranks, the device."""
