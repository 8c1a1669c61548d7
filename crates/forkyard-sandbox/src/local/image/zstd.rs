//! Layers that are compressed with zstd. A stream is frames one after the other: layers that can be read in part have a frame
//! for each of their files, and an index in frames that readers skip.

use std::io::{Error, ErrorKind, Read, Result};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// What a frame may want of memory: what its own tools take without being told to take more.
const MAX_WINDOW_BYTES: u64 = 128 << 20;

/// Whether a stream that begins so is one.
pub fn is_zstd(magic: &[u8]) -> bool {
    matches!(magic, [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18])
}

pub struct Frames<R> {
    source: R,
    frame: FrameDecoder,
}

impl<R: Read> Frames<R> {
    pub fn new(source: R) -> Self {
        let mut frame = FrameDecoder::new();
        frame.set_max_window_size(MAX_WINDOW_BYTES);
        Frames { source, frame }
    }

    pub fn into_inner(self) -> R {
        self.source
    }

    /// Whether there is one.
    fn begin(&mut self) -> Result<bool> {
        loop {
            let mut first = [0];
            if self.source.read(&mut first)? == 0 {
                return Ok(false);
            }
            match self.frame.reset(first.as_slice().chain(&mut self.source)) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    if std::io::copy(&mut self.source.by_ref().take(length), &mut std::io::sink())? < length {
                        return Err(ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(e) => return Err(Error::other(e)),
            }
        }
    }
}

impl<R: Read> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            if self.frame.can_collect() > 0 {
                return self.frame.read(buffer);
            }
            if !self.frame.is_finished() {
                let some = BlockDecodingStrategy::UptoBlocks(1);
                self.frame.decode_blocks(&mut self.source, some).map_err(Error::other)?;
            } else if !self.begin()? {
                return Ok(0);
            }
        }
    }
}
