"""Tuning of dense tiles with MetaSchedule: tasks, builder, runner, search and the job itself."""
