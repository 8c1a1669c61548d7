//! Against a guest whose every answer is written here.

use std::time::Duration;

use forkyard_core::{Attempt, CallId};
use forkyard_guest::protocol::{
    Answer, Fault, MAX_FRAME_TO_GUEST, Op, PREFIX, Reply, Request, decode_prefix, encode,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::{GuestClient, QUIET_WITHIN, Quieted};
use crate::{ErrorKind, ExecRequest};

const WITHIN: Duration = Duration::from_secs(3600);

struct Guest(DuplexStream);

impl Guest {
    /// The next request; None when the connection is over.
    async fn next(&mut self) -> Option<Request> {
        let mut prefix = [0; PREFIX];
        tokio::time::timeout(WITHIN, self.0.read_exact(&mut prefix)).await.expect("nothing is asked").ok()?;
        let (length, head) = decode_prefix(prefix, MAX_FRAME_TO_GUEST).unwrap();
        let mut frame = vec![0; length];
        self.0.read_exact(&mut frame).await.ok()?;
        serde_json::from_slice(&frame[..head]).ok()
    }

    async fn answer(&mut self, seq: u32, answer: Answer) {
        self.0.write_all(&encode(&Reply { seq, answer }, &[])).await.unwrap();
    }
}

async fn pair() -> (GuestClient, Guest) {
    pair_of(1 << 20).await
}

/// Over a stream that holds so much.
async fn pair_of(size: usize) -> (GuestClient, Guest) {
    let (ours, theirs) = tokio::io::duplex(size);
    let ((read, write), mut guest) = (tokio::io::split(ours), Guest(theirs));
    let (client, ()) = tokio::join!(GuestClient::connect_over(read, write, Attempt(1), None), async {
        let hello = guest.next().await.unwrap();
        guest.answer(hello.seq, Answer::Welcome { version: 1 }).await;
    });
    (client.unwrap(), guest)
}

#[tokio::test(start_paused = true)]
async fn what_the_stream_does_not_take_at_once_is_written_in_order() {
    let (client, mut guest) = pair_of(100).await;
    let asked: Vec<_> = (0..20)
        .map(|i| {
            let (client, call) = (client.clone(), CallId::new(format!("call{i}")).unwrap());
            tokio::spawn(async move { client.forget(&call).await })
        })
        .collect();
    tokio::task::yield_now().await;
    client.shutdown();
    let mut seen = Vec::new();
    while seen.len() < 21 {
        let request = guest.next().await.unwrap();
        seen.push(request.seq);
        if let Op::Forget { .. } = request.op {
            guest.answer(request.seq, Answer::Done).await;
        }
    }
    assert!(seen.is_sorted(), "{seen:?}");
    for asked in asked {
        asked.await.unwrap().unwrap();
    }
    drop(client);
    assert!(guest.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_is_gone_has_said_why() {
    let (client, mut guest) = pair().await;
    guest.answer(0, Answer::Error { kind: Fault::Stale, message: "another".into() }).await;
    drop(guest);
    let refused = client.exec(ExecRequest::new(["true"])).await.err().unwrap();
    assert_eq!(refused.kind, ErrorKind::Stale, "{refused}");
    let mut source = tokio::io::repeat(0);
    let refused = client.write_file_from("/a", &mut source, None).await.err().unwrap();
    assert_eq!(refused.kind, ErrorKind::Stale, "{refused}");
}

#[tokio::test(start_paused = true)]
async fn whoever_writes_much_waits_for_a_guest_that_does_not_read() {
    let (client, mut guest) = pair_of(100).await;
    let data = vec![7; 16 << 20];
    let mut source = &data[..];
    let mut upload = Box::pin(client.write_file_from("/a", &mut source, None));
    assert!(futures::poll!(&mut upload).is_pending());
    let begin = guest.next().await.unwrap();
    guest.answer(begin.seq, Answer::Done).await;
    for _ in 0..1000 {
        assert!(futures::poll!(&mut upload).is_pending(), "all of it is in memory");
        tokio::task::yield_now().await;
    }
    let ((), uploaded) = tokio::join!(
        async {
            loop {
                let request = guest.next().await.unwrap();
                if let Op::Commit { .. } = request.op {
                    return guest.answer(request.seq, Answer::Done).await;
                }
            }
        },
        upload
    );
    assert_eq!(uploaded.unwrap(), data.len() as u64);
}

#[tokio::test(start_paused = true)]
async fn a_command_that_is_given_up_before_it_started_is_dropped() {
    let (client, mut guest) = pair().await;
    let mut asked = Box::pin(client.exec(ExecRequest::new(["sleep", "600"])));
    assert!(futures::poll!(&mut asked).is_pending());
    let exec = guest.next().await.unwrap();
    assert!(matches!(exec.op, Op::Exec(_)));
    drop(asked);
    assert_eq!(guest.next().await.unwrap().op, Op::Drop { exec: exec.seq });
    // One that the guest refused is not.
    let (refused, ()) = tokio::join!(client.exec(ExecRequest::new(["none"])), async {
        let exec = guest.next().await.unwrap();
        guest.answer(exec.seq, Answer::Error { kind: Fault::NotFound, message: "none".into() }).await;
    });
    assert_eq!(refused.err().unwrap().kind, ErrorKind::NotFound);
    drop(client);
    assert!(guest.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_is_given_up_before_it_began_is_aborted() {
    let (client, mut guest) = pair().await;
    let mut source: &[u8] = b"data";
    let mut asked = Box::pin(client.write_file_from("file", &mut source, None));
    assert!(futures::poll!(&mut asked).is_pending());
    let begin = guest.next().await.unwrap();
    assert!(matches!(begin.op, Op::WriteBegin { .. }));
    drop(asked);
    assert_eq!(guest.next().await.unwrap().op, Op::Abort { write: begin.seq });
}

#[tokio::test(start_paused = true)]
async fn a_quiet_ends_with_whoever_asked_for_it_and_no_other() {
    // Refused: another's is left alone.
    let (client, mut guest) = pair().await;
    let (refused, ()) = tokio::join!(Quieted::begin(client), async {
        let asked = guest.next().await.unwrap();
        assert_eq!(asked.op, Op::Quiesce);
        let message = "another snapshot is being taken".into();
        guest.answer(asked.seq, Answer::Error { kind: Fault::Unavailable, message }).await;
    });
    assert_eq!(refused.err().unwrap().kind, ErrorKind::Unavailable);
    assert_eq!(guest.next().await, None);

    // Given up: the connection ends, and with it the quiet.
    let (client, mut guest) = pair().await;
    let mut asked = Box::pin(Quieted::begin(client));
    assert!(futures::poll!(&mut asked).is_pending());
    assert_eq!(guest.next().await.unwrap().op, Op::Quiesce);
    drop(asked);
    assert_eq!(guest.next().await, None);
    let (client, mut guest) = pair().await;
    let (quiet, ()) = tokio::join!(Quieted::begin(client), async {
        let asked = guest.next().await.unwrap();
        guest.answer(asked.seq, Answer::Quiet { busy: true, layer: None }).await;
    });
    assert!(quiet.as_ref().unwrap().busy);
    drop(quiet);
    assert_eq!(guest.next().await, None);

    // Never quiet: it is not waited for without end.
    let (client, mut guest) = pair().await;
    let begun = tokio::time::Instant::now();
    let late = Quieted::begin(client).await.err().unwrap();
    assert_eq!((late.kind, begun.elapsed().as_secs()), (ErrorKind::Timeout, QUIET_WITHIN.as_secs()));
    assert_eq!(guest.next().await.unwrap().op, Op::Quiesce);
    assert_eq!(guest.next().await, None);
}
