"""The command `modelserve`, and `kubectl modelserve`: plans of files and of what runs, printed and drawn."""
