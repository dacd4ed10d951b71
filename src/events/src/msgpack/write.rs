//! Writing: each value in the shortest form, as the engines' own encoders do.

/// A message being written.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// The message.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }

    pub(crate) fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    pub(crate) fn unsigned(&mut self, value: u64) {
        let bytes = value.to_be_bytes();
        match value {
            0..=0x7f => self.bytes.push(bytes[7]),
            0x80..=0xff => self.put(0xcc, &bytes[7..]),
            0x100..=0xffff => self.put(0xcd, &bytes[6..]),
            0x1_0000..=0xffff_ffff => self.put(0xce, &bytes[4..]),
            _ => self.put(0xcf, &bytes),
        }
    }

    pub(crate) fn float(&mut self, value: f64) {
        self.put(0xcb, &value.to_bits().to_be_bytes());
    }

    pub(crate) fn array(&mut self, items: usize) {
        self.head(items, (0x90, 16), &[(0xdc, 2), (0xdd, 4)]);
    }

    pub(crate) fn map(&mut self, pairs: usize) {
        self.head(pairs, (0x80, 16), &[(0xde, 2), (0xdf, 4)]);
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.head(text.len(), (0xa0, 32), &[(0xd9, 1), (0xda, 2), (0xdb, 4)]);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    pub(crate) fn raw(&mut self, raw: &[u8]) {
        self.head(raw.len(), (0, 0), &[(0xc4, 1), (0xc5, 2), (0xc6, 4)]);
        self.bytes.extend_from_slice(raw);
    }

    fn put(&mut self, mark: u8, bytes: &[u8]) {
        self.bytes.push(mark);
        self.bytes.extend_from_slice(bytes);
    }

    /// The head of something counted: in one byte below `short.1`, else with the first length that holds it.
    fn head(&mut self, count: usize, short: (u8, usize), long: &[(u8, usize)]) {
        if count < short.1 {
            let low = u8::try_from(count).expect("short forms count below 32");
            return self.bytes.push(short.0 | low);
        }
        let bytes = (count as u64).to_be_bytes();
        let fits = |width: &usize| count >> (8 * width - 1) >> 1 == 0;
        let (mark, width) = long.iter().find(|(_, width)| fits(width)).expect("a batch is below 4 GiB");
        self.put(*mark, &bytes[8 - width..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::Reader;

    fn written(write: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut writer = Writer::default();
        write(&mut writer);
        writer.finish()
    }

    #[test]
    fn values_take_their_shortest_form() {
        assert_eq!(written(|w| w.unsigned(127)), [0x7f]);
        assert_eq!(written(|w| w.unsigned(128)), [0xcc, 128]);
        assert_eq!(written(|w| w.unsigned(65_535)), [0xcd, 255, 255]);
        assert_eq!(written(|w| w.unsigned(65_536))[0], 0xce);
        assert_eq!(written(|w| w.unsigned(1 << 32))[0], 0xcf);
        assert_eq!(written(|w| w.array(15)), [0x9f]);
        assert_eq!(written(|w| w.array(16)), [0xdc, 0, 16]);
        assert_eq!(written(|w| w.array(65_536)), [0xdd, 0, 1, 0, 0]);
        assert_eq!(written(|w| w.map(16)), [0xde, 0, 16]);
        assert_eq!(written(|w| w.raw(&[7])), [0xc4, 1, 7]);
        assert_eq!(written(|w| w.float(1.5)), [0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0]);
        assert_eq!(written(Writer::nil), [0xc0]);
    }

    #[test]
    fn text_of_any_length_comes_back() {
        for length in [0, 31, 32, 255, 256, 65_535, 65_536] {
            let text = "a".repeat(length);
            let bytes = written(|w| w.text(&text));
            assert_eq!(Reader::new(&bytes).text(), Ok(text.as_str()), "{length}");
            let raw = written(|w| w.raw(text.as_bytes()));
            assert_eq!(Reader::new(&raw).raw(), Ok(text.as_bytes()), "{length}");
        }
    }
}
