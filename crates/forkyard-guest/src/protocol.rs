//! Frames and messages. A frame is `u32 length, u32 head length, head, body` (little endian; `length` counts head and body):
//! the head is one JSON message, the body raw bytes. Nothing depends on the transport.
//!
//! Every request carries a number that its connection uses once. Answers carry the number of their request. The first request
//! is [`Op::Hello`]; until it is accepted the guest answers nothing else.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Raised when an old host could misread a new guest or the other way round; both sides refuse another version.
pub const VERSION: u32 = 2;

/// Largest body of one data frame: big enough to be cheap, small enough that streams share a connection fairly.
pub const MAX_CHUNK: usize = 256 << 10;
/// Largest frame that the host takes from a guest, which may be hostile: one chunk and a generous head.
pub const MAX_FRAME_TO_HOST: usize = 2 << 20;
/// Largest frame that a guest takes from its host: the list of a base commit's files is one body.
pub const MAX_FRAME_TO_GUEST: usize = 64 << 20;
/// Frames of output that the guest sends for one command before the host acknowledged any.
pub const OUTPUT_WINDOW: u32 = 32;
/// Bytes of the two lengths in front of a frame.
pub const PREFIX: usize = 8;

/// One message from the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    pub seq: u32,
    #[serde(flatten)]
    pub op: Op,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    /// A newer attempt closes every connection of an older one; an older one is refused as stale.
    Hello {
        version: u32,
        attempt: u32,
        token: Option<String>,
    },

    /// Answered by [`Answer::Started`], then [`Answer::Output`], then [`Answer::Exit`].
    Exec(ExecOp),
    /// Body: bytes for the stdin of the command that `exec` started.
    Stdin {
        exec: u32,
    },
    CloseStdin {
        exec: u32,
    },
    /// To the process group; SIGKILL goes to the whole tree.
    Signal {
        exec: u32,
        signal: i32,
    },
    Resize {
        exec: u32,
        cols: u16,
        rows: u16,
    },
    /// `frames` frames of output were taken by the reader. Not answered.
    Ack {
        exec: u32,
        frames: u32,
    },
    /// The reader is gone: no more output for it. A command without a call id is killed. Not answered.
    Drop {
        exec: u32,
    },
    Forget {
        call: String,
    },
    Calls,

    /// Answered by [`Answer::Data`] frames and [`Answer::Done`].
    Read {
        path: String,
        offset: u64,
        max: u64,
    },
    /// Body: the whole file.
    Write {
        path: String,
        mode: Option<u32>,
    },
    /// A file in parts: `Append` frames with this request's number, then `Commit`, which is answered.
    WriteBegin {
        path: String,
        mode: Option<u32>,
    },
    /// A tar archive in parts, unpacked into `dir` as they arrive: `Append` frames, then `Commit`, as for a file.
    UnpackBegin {
        dir: String,
    },
    Append {
        write: u32,
    },
    Commit {
        write: u32,
    },
    Abort {
        write: u32,
    },
    Stat {
        path: String,
    },
    List {
        path: String,
    },
    Remove {
        path: String,
        recursive: bool,
    },
    MakeDir {
        path: String,
    },
    Glob {
        pattern: String,
        path: Option<String>,
        max: u64,
    },
    Grep {
        pattern: String,
        path: Option<String>,
        glob: Option<String>,
        ignore_case: bool,
        max: u64,
    },
    /// Body: the base as JSON `[[path, mode, oid], …]`. Answered by [`Answer::Changed`] + data, [`Answer::Exported`],
    /// [`Answer::Done`].
    GitExport {
        repo: Option<String>,
        max_bytes: u64,
        max_files: u64,
    },

    /// What lies below a folder, as one [`crate::layer`] stream in [`Answer::Data`] frames, then [`Answer::Done`].
    Pack {
        path: String,
    },

    /// A guest that was made before anybody knew for whom: what its commands find in their environment, and how long from now
    /// the sandbox lasts.
    Adopt {
        lifetime_ms: u64,
        env: BTreeMap<String, String>,
    },

    Stats,
    /// No command may start and no file may be written until `Thaw` or until the connection ends. Answered when the last write
    /// is done, with [`Answer::Quiet`].
    Quiesce,
    /// While quiet, before the root may be replaced. Descriptor: the directory of the new root's upper layer, which counts from
    /// then on, whoever ends the quiet.
    Next,
    Thaw,
    /// Stops or continues every process but the guest.
    Pause,
    Resume,
    /// Local only: descriptors come with the answer.
    Descriptors {
        what: Descriptors,
    },
    /// Ends the sandbox.
    Shutdown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Descriptors {
    /// The listening socket on loopback inside, for the egress proxy.
    Proxy,
    /// User and mount namespace, for replacing the root.
    Namespaces,
    /// The directory of the upper layer.
    Upper,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ExecOp {
    pub call: Option<String>,
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
    pub timeout_ms: Option<u64>,
    pub stdin: bool,
    /// Columns and rows.
    pub pty: Option<(u16, u16)>,
    pub max_output: u64,
}

/// One message from the guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    pub seq: u32,
    #[serde(flatten)]
    pub answer: Answer,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    Welcome {
        version: u32,
    },
    Started {
        resumed: bool,
    },
    /// Body: output.
    Output {
        stderr: bool,
    },
    Exit(ExitInfo),
    Calls {
        calls: Vec<String>,
    },
    /// Body: bytes.
    Data,
    Done,
    Stat {
        info: FileMeta,
    },
    /// Part of a list; `Done` follows the last part.
    Entries {
        entries: Vec<FileMeta>,
    },
    Names {
        names: Vec<String>,
    },
    Matches {
        matches: Vec<MatchMeta>,
        truncated: bool,
        /// Files with a line that is too long to be searched: what follows it was not searched either.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        unsearched: Vec<String>,
    },
    /// A file that differs; its bytes follow as `size` bytes in `Data` frames.
    Changed {
        path: String,
        mode: u32,
        size: u64,
    },
    Exported {
        deleted: Vec<String>,
        skipped: Vec<String>,
    },
    Stats {
        memory_bytes: u64,
        cpu_us: u64,
        processes: u32,
        disk_bytes: Option<u64>,
    },
    /// `busy`: processes other than the guest are alive. `layer`: the number of the layer that the root writes to, where it
    /// has one.
    Quiet {
        busy: bool,
        layer: Option<String>,
    },
    Error {
        kind: Fault,
        message: String,
    },
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitInfo {
    pub exit_code: i32,
    pub signal: Option<i32>,
    pub timed_out: bool,
    pub oom_killed: bool,
    pub duration_us: u64,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    pub truncated: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMeta {
    /// Bytes that are not UTF-8 are written as `\xNN`.
    pub name: String,
    pub kind: Kind,
    pub size: u64,
    pub mode: u32,
    pub modified_ms: u64,
    pub symlink_target: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    File,
    Dir,
    Symlink,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatchMeta {
    pub path: String,
    pub line: u64,
    pub text: String,
}

/// Why a request failed, as far as a caller acts on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    Invalid,
    NotFound,
    Denied,
    Stale,
    TooLarge,
    Unavailable,
}

/// One frame, ready to be written.
pub fn encode<T: Serialize>(message: &T, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(PREFIX + 128 + body.len());
    frame.extend_from_slice(&[0; PREFIX]);
    serde_json::to_writer(&mut frame, message).expect("messages have string keys and no failing parts");
    let head = frame.len() - PREFIX;
    frame.extend_from_slice(body);
    let length = frame.len() - PREFIX;
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    frame[4..8].copy_from_slice(&(head as u32).to_le_bytes());
    frame
}

/// Total length and head length of a frame, checked against `max`.
pub fn decode_prefix(prefix: [u8; PREFIX], max: usize) -> Result<(usize, usize), FrameError> {
    let length = u32::from_le_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]) as usize;
    let head = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
    if length > max || head > length { Err(FrameError { length, head }) } else { Ok((length, head)) }
}

/// The stream is out of step or the peer is hostile: the connection is of no more use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameError {
    pub length: usize,
    pub head: usize,
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "frame of {} bytes with a head of {} is not acceptable", self.length, self.head)
    }
}

impl std::error::Error for FrameError {}

/// Names as the protocol writes them: UTF-8 as it is, other bytes as `\xNN`, and a backslash before an `x` doubled so that
/// no two names are written alike.
pub fn escape_name(name: &[u8]) -> String {
    match std::str::from_utf8(name) {
        Ok(text) => text.replace("\\x", "\\\\x"),
        Err(_) => name
            .utf8_chunks()
            .map(|chunk| {
                let bad: String = chunk.invalid().iter().map(|b| format!("\\x{b:02x}")).collect();
                chunk.valid().replace("\\x", "\\\\x") + &bad
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_carries_message_and_body() {
        let request = Request { seq: 7, op: Op::Write { path: "a\nb".into(), mode: Some(0o600) } };
        let frame = encode(&request, b"\0\xff");
        let (length, head) = decode_prefix(frame[..8].try_into().unwrap(), MAX_FRAME_TO_HOST).unwrap();
        assert_eq!(length, frame.len() - PREFIX);
        assert_eq!(serde_json::from_slice::<Request>(&frame[8..8 + head]).unwrap(), request);
        assert_eq!(&frame[8 + head..], b"\0\xff");
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let prefix = |length: u32, head: u32| {
            let mut p = [0; 8];
            p[..4].copy_from_slice(&length.to_le_bytes());
            p[4..].copy_from_slice(&head.to_le_bytes());
            p
        };
        assert!(decode_prefix(prefix(u32::MAX, 0), MAX_FRAME_TO_HOST).is_err());
        assert!(decode_prefix(prefix(4, 5), MAX_FRAME_TO_HOST).is_err());
        assert_eq!(decode_prefix(prefix(5, 5), MAX_FRAME_TO_HOST), Ok((5, 5)));
    }

    #[test]
    fn names_never_collide() {
        let names: [&[u8]; 5] = [b"a", b"\xff", b"\\xff", b"\\\\xff", "ä\n".as_bytes()];
        let escaped: std::collections::BTreeSet<_> = names.iter().map(|n| escape_name(n)).collect();
        assert_eq!(escaped.len(), names.len());
        assert_eq!(escape_name(b"a\xffb"), "a\\xffb");
    }
}
