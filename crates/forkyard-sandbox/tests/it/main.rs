//! The crate's integration tests: one binary.

mod docker;
mod docker_connections;
mod docker_engine;
mod docker_fixture;
mod docker_hostile;
mod docker_warm;
mod egress_fixture;
mod egress_internal;
mod egress_limits;
mod egress_rules;
mod egress_tools;
mod guest;
mod local;
mod local_attempts;
mod local_disk;
mod local_images;
mod local_roots;
mod local_scale;
mod local_snapshots;
mod local_sweep;
mod machine;
mod real_work;
