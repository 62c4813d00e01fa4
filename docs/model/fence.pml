/*
 * Lease, slot, token and guard: three clients, one store, one resource. README.md beside this file says what came out.
 *
 * Every step of a client is one atomic action, and spin tries all orders of them. So a client may be paused between any
 * two steps for as long as the model lasts, and a client that died is one that is never scheduled again.
 *
 * What there is:
 *   -DGUARD      the resource refuses a token older than the highest it has accepted
 *   -DOPERATIONS the resource keeps operation ids, and refuses one that it has seen
 *   -DCOUNTER    tokens are last + 1, in place of max(last + 1, the store's clock)
 *   -DNO_SLOT    slots are not recorded: only the lease decides
 *   -DFROM_REPLY a holder counts its trust from the reply, in place of before the request
 * What happens, once, at any time:
 *   -DLOSS       the store forgets everything
 *   -DSET_BACK   the store's clock is set back
 *   -DSET_AHEAD  the store's clock is set ahead
 * What must hold:
 *   -DSTALE      no write of an older grant is accepted after one of a newer grant
 *   -DGROWS      every grant has a larger token than any before it
 *   -DTWICE      no slot is entered twice
 *   -DEFFECTS    no slot has two effects
 *   -DOVERLAP    no two clients trust their leases at the same time
 */

#define CLIENTS 3
#define LEASE   3   /* lock_at_most */
#define STEP    5   /* how far the store's clock is set */
#define BEGIN   6
#define END     11
#define NOBODY  0

byte now = BEGIN;   /* true time; the clients' clocks follow it */
byte set_back, set_ahead;
#define STORE_NOW (now + set_ahead - set_back)

/* The store. */
byte last, holder, expires;
bool taken[2];
#ifdef NO_SLOT
#define DONE(slot) false
#else
#define DONE(slot) taken[slot]
#endif

/* The resource. */
byte highest, highest_slot;
bool seen[2];
#ifdef GUARD
#define IS_STALE(token, slot) (token < highest || (token == highest && slot != highest_slot))
#else
#define IS_STALE(token, slot) false
#endif
#ifdef OPERATIONS
#define IS_KNOWN(slot) seen[slot]
#else
#define IS_KNOWN(slot) false
#endif

/* For the assertions only: the true order of grants, and what came of each. */
byte grants, newest_written, largest;
byte entries[2], effects[2];
byte trusted_until[CLIENTS + 1];

inline next_token(token) {
    now++;   /* no two grants within one microsecond */
    if
#ifndef COUNTER
    :: STORE_NOW > last -> last = STORE_NOW
#endif
    :: else -> last = last + 1
    fi;
    token = last
}

/* The clients are alike, so calling the first that reads number 1, and its slot 0, leaves nothing out. */
byte readers;

proctype Client(byte me) {
    byte slot, seen_last, seen_holder, asked, token, order, other;
    bool go;

    atomic {   /* read and decide; a node with a wrong clock thinks any slot is due */
        readers == me - 1 && now < END -> readers++;
        if
        :: slot = 0
        :: me > 1 -> slot = 1
        fi;
        seen_last = last; seen_holder = holder; asked = now;
        go = !DONE(slot) && (holder == NOBODY || expires <= STORE_NOW)
    };
    if :: !go -> goto out :: else fi;

    atomic {   /* swap */
        if
        :: last == seen_last && holder == seen_holder && !DONE(slot) && now < END ->
            next_token(token);
#ifdef GROWS
            assert(token > largest);
            largest = token;
#endif
            grants++; order = grants;
            holder = me; expires = STORE_NOW + LEASE; taken[slot] = true
        :: else -> go = false
        fi
    };
    if :: !go -> goto out :: else fi;

#ifdef FROM_REPLY
    asked = now;
#endif
    atomic {   /* enter the job, if the lease can still be trusted */
        if
        :: now < asked + LEASE ->
            entries[slot]++;
            trusted_until[me] = asked + LEASE;
#ifdef TWICE
            assert(entries[slot] <= 1);
#endif
#ifdef OVERLAP
            for (other : 1 .. CLIENTS) {
                assert(other == me || trusted_until[other] <= now)
            }
            other = 0
#endif
        :: else -> go = false
        fi
    };
    if :: !go -> goto settle :: else fi;

    atomic {   /* write: whatever was checked before was checked before a pause */
        if
        :: IS_STALE(token, slot) || IS_KNOWN(slot)
        :: else ->
#ifdef STALE
            assert(order >= newest_written);
#endif
            effects[slot]++;
#ifdef EFFECTS
            assert(effects[slot] <= 1);
#endif
            newest_written = order; seen[slot] = true;
            if
            :: token > highest -> highest = token; highest_slot = slot
            :: else
            fi
        fi
    };

settle:
    atomic {
        trusted_until[me] = 0;
        if
        :: last == token && holder == me -> holder = NOBODY; expires = 0
        :: else
        fi
    };

out:
    atomic { slot = 0; seen_last = 0; seen_holder = 0; asked = 0; token = 0; order = 0; go = false }
}

active proctype Time() {
    do
    :: now < END -> now++
    :: else -> break
    od
}

#ifdef LOSS
active proctype Loss() {
    atomic { last = 0; holder = NOBODY; expires = 0; taken[0] = false; taken[1] = false }
}
#endif

#ifdef SET_BACK
active proctype SetBack() {
    set_back = STEP
}
#endif

#ifdef SET_AHEAD
active proctype SetAhead() {
    set_ahead = STEP
}
#endif

init {
    atomic { run Client(1); run Client(2); run Client(3) }
}
