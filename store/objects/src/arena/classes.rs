//! Size classes: powers of two and the halves between them, from 64 bytes to a page.

use super::PAGE_BYTES;

/// Bytes of a slot of each class, ascending; the last is a whole page.
pub(crate) const CLASSES: [usize; 28] = classes();

const fn classes() -> [usize; 28] {
    let mut found = [0; 28];
    let mut at = 0;
    let mut power = 64;
    while power < PAGE_BYTES {
        found[at] = power;
        at += 1;
        // Three quarters of a page would leave a quarter of it empty for good.
        if power < PAGE_BYTES / 2 {
            found[at] = power + power / 2;
            at += 1;
        }
        power *= 2;
    }
    found[at] = PAGE_BYTES;
    found
}

/// The class of the smallest slot that holds `bytes`, at most a page.
fn class_above(bytes: usize) -> u8 {
    u8::try_from(CLASSES.partition_point(|slot| *slot < bytes)).expect("28 classes")
}

/// Classes of the extents that a value of `bytes` takes, in order: whole pages, then at most two for the rest.
pub(crate) fn classes_of(bytes: usize) -> impl Iterator<Item = u8> + Clone {
    let page = u8::try_from(CLASSES.len() - 1).expect("28 classes");
    let (pages, rest) = (bytes / PAGE_BYTES, bytes % PAGE_BYTES);
    let above = class_above(rest.max(1));
    let slot = CLASSES[usize::from(above)];
    // A large rest in one slot could waste a third of it: then a full slot and a smaller one.
    let split = rest > 64 * 1024 && slot - rest > slot / 8 && above > 0;
    let (first, second) = match (rest, split) {
        (0, _) => (None, None),
        (_, false) => (Some(above), None),
        (_, true) => (Some(above - 1), Some(class_above(rest - CLASSES[usize::from(above) - 1]))),
    };
    std::iter::repeat_n(page, pages).chain(first).chain(second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_ascend_and_end_with_the_page() {
        assert!(CLASSES.windows(2).all(|pair| pair[0] < pair[1]), "{CLASSES:?}");
        assert_eq!((CLASSES[0], CLASSES[27]), (64, PAGE_BYTES));
    }

    proptest::proptest! {
        #[test]
        fn a_value_fits_and_wastes_little(bytes in 1usize..5_000_000) {
            let slots: usize = classes_of(bytes).map(|c| CLASSES[usize::from(c)]).sum();
            proptest::prop_assert!(slots >= bytes);
            proptest::prop_assert!(slots - bytes <= 64.max(bytes / 2), "{bytes} in {slots}");
            proptest::prop_assert!(bytes < 64 * 1024 || slots - bytes <= bytes / 6, "{bytes} in {slots}");
        }
    }

    #[test]
    fn nothing_takes_nothing_and_a_page_takes_one() {
        assert_eq!(classes_of(0).count(), 0);
        assert_eq!(classes_of(PAGE_BYTES).collect::<Vec<_>>(), [27]);
        assert_eq!(classes_of(PAGE_BYTES + 1).collect::<Vec<_>>(), [27, 0]);
    }
}
