"""Train the same tasks with several systems, each as a whole process from its command to the final
metric.
"""
