"""The bundled pair: a small trained target and its draft heads. README.md beside this file is the model card."""
