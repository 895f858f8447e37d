"""Models spread over a mesh, and several processes as one."""
