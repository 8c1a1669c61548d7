//! Payloads encrypted before they leave: with a key, Temporal keeps what it can't read. All workers and clients of a namespace have
//! the same key, or can't work on each other's runs.

use futures::FutureExt;
use futures::future::BoxFuture;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use temporalio_common::data_converters::{PayloadCodec, PayloadConversionError, SerializationContextData};
use temporalio_common::protos::temporal::api::common::v1::Payload;

/// As others' codecs name it, so that a codec server can tell.
const ENCODING: &str = "encoding";
const ENCRYPTED: &[u8] = b"binary/encrypted";

/// AES-256-GCM; a new nonce for each payload.
pub struct Sealed {
    key: LessSafeKey,
    random: SystemRandom,
}

impl Sealed {
    /// From 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Result<Sealed, String> {
        let wrong = || "write 64 hexadecimal digits, as `openssl rand -hex 32` does".to_string();
        let text = text.trim();
        if text.len() != 64 || !text.is_ascii() {
            return Err(wrong());
        }
        let bytes: Vec<u8> = (0..32)
            .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16))
            .collect::<Result<_, _>>()
            .map_err(|_| wrong())?;
        let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(|_| wrong())?;
        Ok(Sealed { key: LessSafeKey::new(key), random: SystemRandom::new() })
    }

    fn seal(&self, payload: &Payload) -> Option<Payload> {
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).ok()?;
        let mut sealed = prost::Message::encode_to_vec(payload);
        self.key
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut sealed)
            .ok()?;
        let data = [nonce.as_slice(), &sealed].concat();
        Some(Payload {
            metadata: [(ENCODING.to_string(), ENCRYPTED.to_vec())].into(),
            data,
            ..Payload::default()
        })
    }

    fn open(&self, payload: Payload) -> Option<Payload> {
        if payload.metadata.get(ENCODING).map(Vec::as_slice) != Some(ENCRYPTED) {
            // Written before there was a key.
            return Some(payload);
        }
        let (nonce, sealed) = payload.data.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut sealed = sealed.to_vec();
        let opened = self.key.open_in_place(nonce, Aad::empty(), &mut sealed).ok()?;
        prost::Message::decode(&*opened).ok()
    }
}

fn failed(why: &str) -> PayloadConversionError {
    PayloadConversionError::EncodingError(why.into())
}

type Coded = BoxFuture<'static, Result<Vec<Payload>, PayloadConversionError>>;

impl PayloadCodec for Sealed {
    fn encode(&self, _context: &SerializationContextData, payloads: Vec<Payload>) -> Coded {
        let sealed =
            payloads.iter().map(|p| self.seal(p).ok_or_else(|| failed("a payload could not be encrypted")));
        std::future::ready(sealed.collect()).boxed()
    }
    fn decode(&self, _context: &SerializationContextData, payloads: Vec<Payload>) -> Coded {
        let opened = payloads.into_iter().map(|p| {
            self.open(p)
                .ok_or_else(|| failed("a payload was encrypted with another key than temporal.payload_key"))
        });
        std::future::ready(opened.collect()).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_with_the_same_key_alone() {
        let key = Sealed::from_hex(&"a1".repeat(32)).unwrap();
        let plain = Payload { data: b"a prompt".to_vec(), ..Payload::default() };
        let (one, two) = (key.seal(&plain).unwrap(), key.seal(&plain).unwrap());
        assert_ne!(one.data, two.data, "a nonce is used once");
        assert!(!one.data.windows(8).any(|w| w == b"a prompt"));
        assert_eq!(key.open(one.clone()).unwrap(), plain);
        assert_eq!(key.open(plain.clone()).unwrap(), plain, "what was written before there was a key");
        let other = Sealed::from_hex(&"a2".repeat(32)).unwrap();
        assert!(other.open(one.clone()).is_none());
        let mut torn = one;
        torn.data.truncate(5);
        assert!(key.open(torn).is_none());
    }

    #[test]
    fn a_key_that_is_none_is_refused_with_the_fix() {
        for bad in ["", "abc", &"zz".repeat(32), &"ä".repeat(32)] {
            assert!(Sealed::from_hex(bad).err().unwrap().contains("64 hexadecimal digits"), "{bad}");
        }
    }
}
