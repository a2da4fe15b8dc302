"""Running untrusted programs; `Sandbox` is the way in."""
