package machinedeployment

import (
	"cmp"
	"math"
	"slices"
)

// A share is a set that takes part in a change of the deployment's replicas.
// Machines that the cluster-autoscaler has chosen are no longer in its replicas,
// and on their way out.
type share struct {
	counts

	Grows bool  // it gets what there is more; none does when the rollout sees to that
	Max   int32 // replicas + surge of the deployment as last noted on the set; 0 for unknown
}

// divide works out the replicas of a deployment's active sets, oldest first, when
// its replicas change to desired in the middle of a rollout: allowed in sum. More
// go to the set that grows, no more than there is room for. Fewer are taken where
// machines do not work, of the others first, and then from all in proportion: no
// step deletes an available machine that is needed.
func divide(desired, allowed, room int32, shares []share) []int32 {
	replicas := make([]int32, len(shares))
	var all int32
	for i, s := range shares {
		replicas[i] = s.Replicas
		all += s.Replicas
	}
	if allowed < all {
		shrink(allowed, all-allowed, shares, replicas)

		return replicas
	}
	for i, s := range shares {
		if s.Grows {
			replicas[i] += max(0, min(room, allowed-all, desired-replicas[i]))
		}
	}

	return replicas
}

// shrink takes n replicas away.
func shrink(allowed, n int32, shares []share, replicas []int32) {
	for _, grows := range []bool{false, true} {
		for i, s := range shares {
			if s.Grows == grows {
				taken := min(n, s.broken())
				replicas[i] -= taken
				n -= taken
			}
		}
	}
	order := make([]int, len(shares))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(replicas[b], replicas[a]) })
	rest := n
	for _, i := range order {
		taken := min(rest, replicas[i]-fraction(replicas[i], allowed, shares[i].Max))
		replicas[i] -= taken
		rest -= taken
	}
	for _, i := range order { // what rounding has left
		taken := min(rest, replicas[i])
		replicas[i] -= taken
		rest -= taken
	}
}

// fraction is what a set of that many replicas keeps when the most that the
// deployment may have goes down to allowed.
func fraction(replicas, allowed, before int32) int32 {
	if before <= 0 || before <= allowed {
		return replicas
	}

	return min(replicas, int32(math.Round(float64(replicas)*float64(allowed)/float64(before))))
}
