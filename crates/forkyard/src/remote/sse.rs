//! Server-sent events out of pieces that are cut anywhere.

/// An event's data at most: the store's largest, and what is around it.
const MAX_BYTES: usize = 32 << 20;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Empty if it has none.
    pub name: String,
    pub id: Option<String>,
    pub data: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
#[error("an event is larger than {MAX_BYTES} bytes")]
pub struct TooLarge;

/// Takes bytes, gives events. The server ends lines with LF and writes data in one line.
#[derive(Default)]
pub struct Frames {
    line: Vec<u8>,
    frame: Frame,
}

impl Frames {
    pub fn take(&mut self, piece: &[u8], mut each: impl FnMut(Frame)) -> Result<(), TooLarge> {
        for part in piece.split_inclusive(|b| *b == b'\n') {
            self.line.extend_from_slice(part);
            if self.line.len() > MAX_BYTES {
                return Err(TooLarge);
            }
            if self.line.pop_if(|b| *b == b'\n').is_none() {
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let text = || String::from_utf8_lossy(&line).into_owned();
            if line.is_empty() {
                let frame = std::mem::take(&mut self.frame);
                if frame != Frame::default() {
                    each(frame);
                }
            } else if let Some(data) = line.strip_prefix(b"data: ") {
                self.frame.data = data.to_vec();
            } else if let Some(id) = text().strip_prefix("id: ") {
                self.frame.id = Some(id.to_string());
            } else if let Some(name) = text().strip_prefix("event: ") {
                self.frame.name = name.to_string();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_wherever_pieces_are_cut() {
        let text = b"retry: 1000\n\nid: 17\ndata: {\"a\":1}\n\n: ping\n\nevent: end\ndata: {}\n\n";
        for cut in 0..text.len() {
            let mut found = vec![];
            let mut frames = Frames::default();
            for piece in [&text[..cut], &text[cut..]] {
                frames.take(piece, |f| found.push(f)).unwrap();
            }
            let first = Frame { id: Some("17".into()), data: b"{\"a\":1}".to_vec(), ..Frame::default() };
            let last = Frame { name: "end".into(), data: b"{}".to_vec(), ..Frame::default() };
            assert_eq!(found, [first, last], "cut at {cut}");
        }
    }
}
