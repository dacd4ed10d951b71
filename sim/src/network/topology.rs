//! Flows and the paths over them.

/// The most links on one path.
pub const MAX_PATH_LINKS: usize = 4;

/// One transfer of KV bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// One direction of one NIC group, a PCIe host link, an SSD's read side and so on; dense from zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

impl LinkId {
    /// The id as an array position.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The rate and the latency of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpec {
    /// Rate that its flights share; more than 10¹⁵ counts as 10¹⁵, and 0 stalls them.
    pub bytes_per_s: u64,
    /// Added once to each flight, after its last byte has left.
    pub latency_us: u64,
}

/// Why links make no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("transfer path: name 1 to {MAX_PATH_LINKS} links, each once")]
pub struct PathError;

/// The links that a flight holds together, for example a source's egress and a target's ingress:
/// one to four, each once. Held inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathLinks {
    ids: [LinkId; MAX_PATH_LINKS],
    len: u8,
}

impl PathLinks {
    /// The path over `links`.
    ///
    /// # Errors
    /// When there are none, more than four, or one twice.
    pub fn new(links: &[LinkId]) -> Result<Self, PathError> {
        let repeated = links.iter().enumerate().any(|(i, link)| links[..i].contains(link));
        if links.is_empty() || links.len() > MAX_PATH_LINKS || repeated {
            return Err(PathError);
        }
        let mut ids = [LinkId(0); MAX_PATH_LINKS];
        ids[..links.len()].copy_from_slice(links);
        #[expect(clippy::cast_possible_truncation, reason = "at most four")]
        Ok(Self { ids, len: links.len() as u8 })
    }

    /// The path over one link.
    #[must_use]
    pub const fn one(link: LinkId) -> Self {
        Self { ids: [link; MAX_PATH_LINKS], len: 1 }
    }

    /// The links, in the order given.
    #[must_use]
    pub fn as_slice(&self) -> &[LinkId] {
        &self.ids[..usize::from(self.len)]
    }
}

impl TryFrom<Vec<LinkId>> for PathLinks {
    type Error = PathError;

    fn try_from(links: Vec<LinkId>) -> Result<Self, PathError> {
        Self::new(&links)
    }
}

impl From<PathLinks> for Vec<LinkId> {
    fn from(path: PathLinks) -> Self {
        path.as_slice().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;
    use std::vec;

    #[test]
    fn a_path_has_one_to_four_distinct_links() {
        let ids: Vec<LinkId> = (0..5).map(LinkId).collect();
        assert_eq!(PathLinks::new(&[]), Err(PathError));
        assert_eq!(PathLinks::new(&ids), Err(PathError));
        assert_eq!(PathLinks::new(&[ids[1], ids[0], ids[1]]), Err(PathError));
        let path = PathLinks::new(&ids[..4]).unwrap();
        assert_eq!(path.as_slice(), &ids[..4]);
        assert_eq!(PathLinks::one(ids[3]).as_slice(), &[ids[3]]);
        assert!(PathError.to_string().contains("1 to 4"));
    }

    #[test]
    fn a_path_survives_the_list_that_it_is_written_as() {
        let path = PathLinks::new(&[LinkId(2), LinkId(9)]).unwrap();
        let list: Vec<LinkId> = path.into();
        assert_eq!(list, vec![LinkId(2), LinkId(9)]);
        assert_eq!(PathLinks::try_from(list), Ok(path));
    }
}
