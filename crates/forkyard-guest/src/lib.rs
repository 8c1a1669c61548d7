//! What the host and the guest say to each other.
//!
//! The guest is one small static program inside every sandbox. [`protocol`] is spoken with it over any byte stream: a Unix
//! socket (local), or the stdio of a relay that the container engine started. [`zygote`] is spoken only by the local provider
//! with the process that its sandboxes are cloned from.
//!
//! [`container`] is what a container's guest is told and says before anybody can speak with it.
//! [`layer`] is what both sides know of a folder as a stream.
//!
//! The program's own modules belong to the binary (feature `program`); the host links none of them.

pub mod container;
pub mod layer;
pub mod protocol;
pub mod zygote;
