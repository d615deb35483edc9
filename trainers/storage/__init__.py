"""Directories, files and safetensors of saves, local or remote."""
