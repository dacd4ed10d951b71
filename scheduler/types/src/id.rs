//! Identifiers: newtypes, so that an instance is never mistaken for a request.

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The id as an array position.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// One client request, unique for the life of a conductor.
    RequestId(u64)
);
id!(
    /// One engine instance (a prefill, decode or coupled engine), dense from zero.
    InstanceId(u32)
);
id!(
    /// One tenant, dense from zero; tenant 0 is the anonymous one.
    TenantId(u32)
);
id!(
    /// One service class, an index into the configured classes.
    ClassId(u16)
);
id!(
    /// The life number of an instance: a restart is a new epoch, and older messages are ignored (I12).
    Epoch(u32)
);

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn ids_print_and_index_as_their_number() {
        assert_eq!(InstanceId(7).to_string(), "7");
        assert_eq!(RequestId(9).index(), 9);
        assert!(Epoch(1) < Epoch(2));
    }

    #[test]
    fn epochs_of_a_life_are_ordered_and_ids_start_at_zero() {
        let lives = [Epoch(3), Epoch(1), Epoch(2)];
        assert_eq!(lives.iter().max(), Some(&Epoch(3)));
        assert_eq!((TenantId::default(), ClassId::default()), (TenantId(0), ClassId(0)));
        assert_eq!(ClassId(u16::MAX).index(), 65_535);
    }
}
