"""The command line. Each command imports the room that it needs when it runs; nobody imports this one."""
