//! Series by a name that others choose: each of the first names has its own, all further ones share one.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// The name of all further ones.
const OTHER: &str = "other";

/// Up to `MOST` series by name, and one for the others.
pub(super) struct BoundedSeries<T, const MOST: usize> {
    by_name: Mutex<BTreeMap<String, T>>,
}

impl<T, const MOST: usize> Default for BoundedSeries<T, MOST> {
    fn default() -> Self {
        Self { by_name: Mutex::default() }
    }
}

impl<T, const MOST: usize> BoundedSeries<T, MOST> {
    /// Acts on the series of a name, which `new` makes on the first call, and gives the name that it has.
    pub(super) fn with<R>(
        &self,
        name: &str,
        new: impl FnOnce(&str) -> T,
        act: impl FnOnce(&mut T, &str) -> R,
    ) -> R {
        let mut by_name = self.by_name.lock();
        if let Some(series) = by_name.get_mut(name) {
            return act(series, name);
        }
        let name = if by_name.len() < MOST { name } else { OTHER };
        act(by_name.entry(name.to_owned()).or_insert_with(|| new(name)), name)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_name.lock().len()
    }
}
