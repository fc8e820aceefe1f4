"""The engine process from outside: started, watched, restarted; the server's own start and end."""
