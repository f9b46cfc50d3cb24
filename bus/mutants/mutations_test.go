package mutants

var mutations = []mutation{
	{
		name: "refused BEGUN counts", file: "replica/begin.go", tests: "TestCutOffReplicaIsFenced|TestModel",
		old:     "driverv1.Claim_STATE_BEGUN), expected, 0)\n\tif err != nil {",
		mutated: "driverv1.Claim_STATE_BEGUN), expected, 0)\n\tif _, replaced := opstream.ConflictOf(err); err != nil && !replaced {",
	},
	{
		name: "refused outcome counts", file: "replica/operation.go", tests: "TestResultCounts",
		old: "op.outcomeStored && !op.fenced ||", mutated: "op.outcomeStored ||",
	},
	{
		name: "unanswered BEGUN counts", file: "replica/begin.go", tests: "TestBeginUnacknowledged|TestModel",
		old: "\t\tcase err != nil:\n\t\t\treturn cs.refuseBegin", mutated: "\t\tcase err != nil && false:\n\t\t\treturn cs.refuseBegin",
	},
	{
		name: "late BEGUN counts", file: "replica/begin.go", tests: "TestBeginAcknowledgedLate",
		old: "case fresh:", mutated: "case fresh || err == nil:",
	},
	{
		name: "two calls write at once", file: "replica/begin.go", tests: "TestTwoCallsBeginAtOnce",
		old: "op.beginning.Lock() // or two calls would take each other's record for another attempt's\n\tdefer op.beginning.Unlock()\n", mutated: "\n",
	},
	{
		name: "claim is not replaced", file: "replica/claim.go", tests: "TestClaimRace|TestModel",
		old: "case errors.Is(err, opstream.ErrConflict):\n", mutated: "case errors.Is(err, opstream.ErrConflict):\n\t\treturn nil\n",
	},
	{
		name: "no recover after BEGUN", file: "caller/mutate.go", tests: "TestDeadReplicasMutationGoesToAnother|TestModel",
		old: "m.number, m.recover = m.lastRan+1, true", mutated: "m.number = m.lastRan + 1",
	},
	{
		name: "no wait without identity", file: "caller/mutate.go", tests: "TestDeadReplicasCreateWithoutIdentityWaits|TestModel",
		old: "case !m.nothingBegun && now.Before(lost):", mutated: "case !m.nothingBegun && now.Before(lost) && false:",
	},
	{
		name: "stuck call is not feared", file: "caller/mutate.go", tests: "TestStuck_NoIdentity",
		old: `case stuck != "":`, mutated: `case stuck != "" && false:`,
	},
	{
		name: "BEGUN is nothing begun", file: "caller/claimreader.go", tests: "TestDeadReplicasCreateWithoutIdentityWaits|TestModel",
		old: "if c.GetState() == driverv1.Claim_STATE_RUNNING {", mutated: "if claimRuns(c) {",
	},
	{
		name: "RELEASED is nothing begun", file: "caller/claimreader.go", tests: "TestReleasedCreateWithoutIdentityWaits",
		old:     "if c.GetState() == driverv1.Claim_STATE_RUNNING {",
		mutated: "if c.GetState() == driverv1.Claim_STATE_RUNNING || c.GetState() == driverv1.Claim_STATE_RELEASED {",
	},
	{
		name: "young stream lost nothing", file: "caller/claimreader.go", tests: "TestClaimLostWithItsStream",
		old: "(age > bus.AcceptBy+r.req.Timeout ||", mutated: "(age >= 0 ||",
	},
	{
		name: "lost create of another id", file: "caller/claimreader.go", tests: "TestLostCreateOfAnotherOperation",
		old: "\tr.noteLostCreate(c)\n", mutated: "\n",
	},
	{
		name: "later operation is replaced", file: "caller/claimreader.go", tests: "TestJudgeClaim",
		old: "return isStale\n", mutated: "return isFree\n",
	},
	{
		name: "plain claim is free", file: "caller/claimreader.go", tests: "TestJudgeClaim|TestModel",
		old: "case same && c.GetReplica() == bus.PlainReplica:", mutated: "case same && c.GetReplica() == bus.PlainReplica && false:",
	},
	{
		name: "sequences begin at 1", file: "caller/streams.go", tests: "TestStreamDeletedUnderUs|TestStreamIsMadeSafe",
		old: "return 1 + rand.Uint64N(1<<52)", mutated: "return 1 + 0*rand.Uint64N(1<<52)",
	},
	{
		name: "rollback is not noticed", file: "caller/streams.go", tests: "TestStoreRollsBack",
		old: "case there.last < known.last:", mutated: "case there.last < known.last && false:",
	},
	{
		name: "lost stream is made at once", file: "caller/streams.go", tests: "TestLostStreamIsMadeLater",
		old: "wait := bus.AcceptBy - time.Since(st.goneSince)", mutated: "wait := -time.Since(st.goneSince)",
	},
	{
		name: "frame of another attempt", file: "caller/attempt.go", tests: "TestFramesOfStrangersAreDropped|TestModel",
		old: "case env.GetAttempt() != a.number:", mutated: "case env.GetAttempt() != a.number && false:",
	},
	{
		name: "result counts unstored", file: "replica/operation.go", tests: "TestResultAskedForAgainCountsOnceStored",
		old: "return !op.askedAgain || ", mutated: "return true || ",
	},
	{
		name: "plain accept_by from sending", file: "caller/call.go", tests: "TestPlainRequestIsAsOldAsItsClaim",
		old: "now = k.plainClaimAt", mutated: "now = now.Add(0)",
	},
	{
		name: "lower epoch is accepted", file: "replica/managers.go", tests: "TestLowerEpochIsRefused",
		old: "epoch < highest {", mutated: "epoch < highest && false {",
	},
	{
		name: "late request is accepted", file: "replica/receive.go", tests: "TestServerRefuses|TestModel",
		old: "!op.started.After(by.AsTime())", mutated: "!op.started.After(by.AsTime()) || true",
	},
}
