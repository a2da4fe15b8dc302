"""Code that runs inside sandboxed interpreters. Standard library only; nothing here imports eval."""
