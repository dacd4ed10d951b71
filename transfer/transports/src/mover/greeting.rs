//! The first record either way on every connection: of one size, so that nothing has to be believed to read
//! it.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `BTNM` |
//! | 4 | 2 | version of the protocol |
//! | 6 | 1 | what it asks for, or the answer |
//! | 7 | 1 | bytes of the text |
//! | 8 | 8, 8 | epoch of the peer that is meant, epoch of the sender |
//! | 24 | 16 | session: drawn at random by the opener of the path |
//! | 40 | 4, 4, 8 | largest slice, slices outstanding, bytes outstanding |
//! | 56 | 256 | text: the sender's address, or why not |
//! | 312 | 8 | checksum of all before |

use super::port::Fault;

/// Size of a greeting.
pub(super) const GREETING_BYTES: usize = 320;
const MAGIC: [u8; 4] = *b"BTNM";
const VERSION: u16 = 1;
const TEXT_BYTES_MAX: usize = 255;

/// The request or the answer of a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To carry slices of a path.
    Lane = 1,
    /// To end what is left of a session.
    Fence = 2,
    /// It is done.
    Welcome = 3,
    /// Another life lives here.
    Stale = 4,
    /// The two do not fit together.
    Invalid = 5,
    /// Too many connections.
    Busy = 6,
    /// Asks for the published memory. The epoch of the peer does not matter.
    Look = 7,
}

impl Purpose {
    fn from_code(code: u8) -> Option<Self> {
        use Purpose as P;
        let all = [P::Lane, P::Fence, P::Welcome, P::Stale, P::Invalid, P::Busy, P::Look];
        all.into_iter().find(|p| *p as u8 == code)
    }
}

/// The first record in either direction on every connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) purpose: Purpose,
    pub(super) to_epoch: u64,
    pub(super) from_epoch: u64,
    pub(super) session: u128,
    pub(super) slice_bytes_max: u32,
    pub(super) outstanding_max: u32,
    pub(super) credit_bytes: u64,
    pub(super) text: String,
}

impl Greeting {
    /// As bytes. A text that is too long is cut.
    pub(super) fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut text = self.text.as_str();
        while text.len() > TEXT_BYTES_MAX {
            let end = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text = &text[..end];
        }
        let mut record = [0; GREETING_BYTES];
        record[..4].copy_from_slice(&MAGIC);
        record[4..6].copy_from_slice(&VERSION.to_le_bytes());
        record[6] = self.purpose as u8;
        record[7] = u8::try_from(text.len()).expect("cut to 255");
        record[8..16].copy_from_slice(&self.to_epoch.to_le_bytes());
        record[16..24].copy_from_slice(&self.from_epoch.to_le_bytes());
        record[24..40].copy_from_slice(&self.session.to_le_bytes());
        record[40..44].copy_from_slice(&self.slice_bytes_max.to_le_bytes());
        record[44..48].copy_from_slice(&self.outstanding_max.to_le_bytes());
        record[48..56].copy_from_slice(&self.credit_bytes.to_le_bytes());
        record[56..56 + text.len()].copy_from_slice(text.as_bytes());
        let sum = crate::checksum(&record[..312]);
        record[312..].copy_from_slice(&sum.to_le_bytes());
        record
    }

    /// From bytes.
    ///
    /// # Errors
    /// [`Fault::Invalid`] for what is not a greeting of this version.
    pub(super) fn decode(record: &[u8; GREETING_BYTES]) -> Result<Self, Fault> {
        let invalid = |text: String| Err(Fault::Invalid(text));
        if !may_begin(record) {
            return invalid("what is there does not speak this protocol; check the port".into());
        }
        let version = u16::from_le_bytes(field(record, 4));
        if version != VERSION {
            return invalid(format!("it speaks version {version}, this is {VERSION}; run the same release"));
        }
        if u64::from_le_bytes(field(record, 312)) != crate::checksum(&record[..312]) {
            return invalid("its greeting is damaged".into());
        }
        let Some(purpose) = Purpose::from_code(record[6]) else {
            return invalid(format!("its greeting has the unknown purpose {}", record[6]));
        };
        Ok(Self {
            purpose,
            to_epoch: u64::from_le_bytes(field(record, 8)),
            from_epoch: u64::from_le_bytes(field(record, 16)),
            session: u128::from_le_bytes(field(record, 24)),
            slice_bytes_max: u32::from_le_bytes(field(record, 40)),
            outstanding_max: u32::from_le_bytes(field(record, 44)),
            credit_bytes: u64::from_le_bytes(field(record, 48)),
            text: String::from_utf8_lossy(&record[56..56 + usize::from(record[7])]).into_owned(),
        })
    }

    /// The answer as the opener of a lane understands it.
    ///
    /// # Errors
    /// The fault that it names.
    pub(super) fn welcome(self) -> Result<Self, Fault> {
        match self.purpose {
            Purpose::Welcome => Ok(self),
            Purpose::Stale => Err(Fault::Stale(self.text)),
            Purpose::Busy => Err(Fault::Path(self.text)),
            _ => Err(Fault::Invalid(self.text)),
        }
    }
}

/// Whether what has come so far can be the beginning of a greeting.
pub(super) fn may_begin(bytes: &[u8]) -> bool {
    bytes.iter().zip(MAGIC).all(|(got, meant)| *got == meant)
}

/// `N` bytes at `at`.
pub(super) fn field<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    record[at..at + N].try_into().expect("a range of N bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting() -> Greeting {
        Greeting {
            purpose: Purpose::Lane,
            to_epoch: 1,
            from_epoch: 2,
            session: 3,
            slice_bytes_max: 4,
            outstanding_max: 5,
            credit_bytes: 6,
            text: "10.0.0.1:7000".into(),
        }
    }

    #[test]
    fn it_comes_back_as_it_was() {
        assert_eq!(Greeting::decode(&greeting().encode()).unwrap(), greeting());
        let long = Greeting { text: "é".repeat(200), ..greeting() };
        assert_eq!(Greeting::decode(&long.encode()).unwrap().text, "é".repeat(127));
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        let refused = |at: usize| {
            let mut record = greeting().encode();
            record[at] ^= 0x40;
            match Greeting::decode(&record) {
                Err(Fault::Invalid(text)) => text,
                other => panic!("{other:?}"),
            }
        };
        assert!(refused(0).contains("port"));
        assert!(refused(4).contains("release"));
        for at in [7, 9, 30, 60, 311, 319] {
            assert!(refused(at).contains("damaged"), "byte {at}");
        }
    }
}
